! Products on several contexts of one program, compared with pdgemm: process grids by rows and by columns, some with
! idle ranks, halves of the ranks with different numbers of calls, and a context after another was freed. Leading
! dimensions are too large, first blocks are anywhere, and C is NaN before beta = 0. Then C^H C of slabs in three ways,
! in a thread.
program contexts
    use mpi
    use pmm3d
    implicit none
    integer, parameter :: dp = kind(1d0), nb = 7
    integer :: ierr, rank, ranks, provided, half, i, handles(4)
    real(dp) :: worst, largest

    call MPI_Init_thread(MPI_THREAD_FUNNELED, provided, ierr)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks, ierr)
    worst = 0
    call MPI_Comm_split(MPI_COMM_WORLD, rank/2, -rank, half, ierr) ! two halves, in reverse order
    call ok(pmm3d_context(MPI_COMM_WORLD, 2, 2, 'R', handles(1)))
    call ok(pmm3d_context(MPI_COMM_WORLD, 2, 2, 'c', handles(2)))
    call ok(pmm3d_context(MPI_COMM_WORLD, 3, 1, 'R', handles(3)))
    call ok(pmm3d_context(half, 1, 2, 'R', handles(4)))
    do i = 1, 3
        call compare(MPI_COMM_WORLD, handles(1), 2, 2, 'R', 30 + i, 41, 52)
        call compare(MPI_COMM_WORLD, handles(2), 2, 2, 'C', 30, 41 + i, 52)
        call compare(MPI_COMM_WORLD, handles(3), 3, 1, 'R', 30, 41, 52 + i)
        if (rank < 2 .or. i == 1) call compare(half, handles(4), 1, 2, 'R', 20 + i, 31, 12)
    end do
    call MPI_Comm_free(half, ierr)
    call ok(pmm3d_free(handles(3)))
    call ok(pmm3d_context(MPI_COMM_WORLD, 1, 3, 'R', handles(3)))
    call compare(MPI_COMM_WORLD, handles(3), 1, 3, 'R', 30, 41, 52)
    !$omp parallel num_threads(2)
    !$omp master
    call overlap
    !$omp end master
    !$omp end parallel
    call MPI_Reduce(worst, largest, 1, MPI_DOUBLE_PRECISION, MPI_MAX, 0, MPI_COMM_WORLD, ierr)
    if (rank == 0) print "('differs by at most ', es8.1)", largest
    call ok(pmm3d_finalize())
    call MPI_Finalize(ierr)

contains

    ! C = 1.5 A B into NaN, then a part of it, by a call and by a plan, then C = 0 A B + 0.5 C.
    subroutine compare(comm, context, rows, columns, order, m, n, k)
        integer, intent(in) :: comm, context, rows, columns, m, n, k
        character, intent(in) :: order
        real(dp), allocatable, target :: a(:, :), b(:, :), c(:, :), theirs(:, :)
        integer, dimension(9) :: desca, descb, descc
        integer :: blacs, place(5), plan, i
        integer, external :: sys2blacs_handle
        blacs = sys2blacs_handle(comm)
        call blacs_gridinit(blacs, order, rows, columns)
        place = [blacs, rows, columns, -1, -1]
        if (blacs >= 0) call blacs_gridinfo(blacs, place(2), place(3), place(4), place(5))
        call make(place, m, k, 1, a, desca)
        call make(place, k, n, 2, b, descb)
        call make(place, m, n, 3, c, descc)
        c = -sqrt(-c)*0 ! NaN
        allocate (theirs, source=c)
        if (place(4) >= 0) then
            call pdgemm('N', 'N', m, n, k, 1.5_dp, a, 1, 1, desca, b, 1, 1, descb, 0._dp, theirs, 1, 1, descc)
            do i = 1, 2
                call pdgemm('N', 'N', m - 3, n - 2, k - 1, 1.5_dp, a, 2, 2, desca, b, 1, 3, descb, 0.5_dp, theirs, &
                            4, 2, descc)
            end do
            call pdgemm('N', 'N', m, n, k, 0._dp, a, 1, 1, desca, b, 1, 1, descb, 0.5_dp, theirs, 1, 1, descc)
        end if
        call ok(pmm3d_pgemm(context, 'd', 'N', 'N', m, n, k, 1.5_dp, a, 1, 1, desca, b, 1, 1, descb, 0._dp, c, 1, 1, &
                            descc))
        call ok(pmm3d_plan_pgemm(context, 'd', 'N', 'N', m - 3, n - 2, k - 1, 1.5_dp, a, 2, 2, desca, b, 1, 3, descb, &
                                 0.5_dp, c, 4, 2, descc, plan))
        call ok(pmm3d_run(plan))
        call ok(pmm3d_run(plan))
        call ok(pmm3d_free(plan))
        call ok(pmm3d_pgemm(context, 'd', 'N', 'N', m, n, k, 0._dp, a, 1, 1, desca, b, 1, 1, descb, 0.5_dp, c, 1, 1, &
                            descc))
        if (place(4) >= 0) call blacs_gridexit(blacs)
        worst = max(worst, differing(cmplx(c, 0, dp), cmplx(theirs, 0, dp)))
    end subroutine

    ! Random elements. place: BLACS context, its rows and columns, and this rank's. Ranks outside of the process grid
    ! pass the same descriptor, with LLD 1.
    subroutine make(place, height, width, which, x, desc)
        integer, intent(in) :: place(5), height, width, which
        real(dp), allocatable, target, intent(out) :: x(:, :)
        integer, intent(out) :: desc(9)
        integer :: first(2), extent(2)
        integer, external :: numroc
        first = [mod(which, place(2)), mod(which + 1, place(3))]
        extent = 0
        if (place(4) >= 0) extent = [numroc(height, nb, place(4), first(1), place(2)) + 5, &
                                     numroc(width, nb, place(5), first(2), place(3))]
        allocate (x(extent(1), extent(2)))
        call random_number(x)
        desc = [1, place(1), height, width, nb, nb, first(1), first(2), max(1, extent(1))]
    end subroutine

    ! S = C^H C, where ranks have slabs of C: by pgemr2d and pgemm, by matrices of a grid, and by pzgemm.
    subroutine overlap
        integer, parameter :: rows = 103, columns = 37
        complex(dp), allocatable, target :: slab(:, :), moved(:, :), s(:, :, :), shard(:, :), of_s(:, :)
        real(dp), allocatable :: parts(:, :, :)
        integer :: slabs, blacs, row, column, box(4), grid, coefficients, product, descs(9), descm(9), desc(9)
        integer, external :: numroc
        complex(dp), parameter :: one = 1, zero = 0
        call ok(pmm3d_context(MPI_COMM_WORLD, ranks, 1, 'R', slabs))
        call blacs_get(-1, 0, blacs)
        call blacs_gridinit(blacs, 'R', 2, 2)
        call blacs_gridinfo(blacs, i, i, row, column)
        i = (rows + ranks - 1)/ranks
        descs = [1, 0, rows, columns, i, columns, 0, 0, max(1, numroc(rows, i, rank, 0, ranks))]
        descm = [1, blacs, rows, columns, nb, nb, 0, 0, numroc(rows, nb, row, 0, 2)]
        desc = [1, blacs, columns, columns, nb, nb, 0, 0, numroc(columns, nb, row, 0, 2)]
        allocate (slab(descs(9), columns), parts(descs(9), columns, 2))
        allocate (moved(descm(9), numroc(columns, nb, column, 0, 2)), s(desc(9), numroc(columns, nb, column, 0, 2), 3))
        call random_number(parts)
        slab = cmplx(parts(:, :, 1), parts(:, :, 2), dp)
        call ok(pmm3d_pgemr2d('z', rows, columns, slab, 1, 1, descs, slabs, moved, 1, 1, descm, handles(1)))
        call pzgemm('C', 'N', columns, columns, rows, one, moved, 1, 1, descm, moved, 1, 1, descm, zero, s(1, 1, 1), &
                    1, 1, desc)
        call ok(pmm3d_pgemm(handles(1), 'z', 'C', 'N', columns, columns, rows, one, moved, 1, 1, descm, moved, 1, 1, &
                            descm, zero, s(1, 1, 2), 1, 1, desc))
        call ok(pmm3d_grid_for(MPI_COMM_WORLD, 'z', columns, columns, 1000*rows, grid))
        call ok(pmm3d_box(grid, 'A', rows, columns, box))
        allocate (shard(box(1):box(2), box(3):box(4)))
        call ok(pmm3d_matrix(grid, 'z', rows, columns, 'A', 'F', shard, coefficients))
        call ok(pmm3d_box(grid, 'C', columns, columns, box))
        allocate (of_s(box(1):box(2), box(3):box(4)))
        call ok(pmm3d_matrix(grid, 'z', columns, columns, 'C', 'F', of_s, product))
        call ok(pmm3d_from_block_cyclic(slabs, slab, descs, coefficients))
        call ok(pmm3d_matmul('C', 'N', one, coefficients, coefficients, zero, product))
        call ok(pmm3d_to_block_cyclic(product, handles(1), s(1, 1, 3), desc))
        worst = max(worst, differing(s(:, :, 2), s(:, :, 1)), differing(s(:, :, 3), s(:, :, 1)))
    end subroutine

    ! The largest difference; 1 for NaN in only one of the two, as gaps below the rows of a matrix have in both.
    real(dp) function differing(ours, theirs)
        complex(dp), intent(in) :: ours(:, :), theirs(:, :)
        differing = maxval([0._dp, merge(abs(ours - theirs), 0._dp, ours == ours .or. theirs == theirs)])
        if (any((ours == ours) .neqv. (theirs == theirs))) differing = 1
    end function

    subroutine ok(code)
        integer, intent(in) :: code
        if (code == PMM3D_OK) return
        print "(i0, 1x, a)", rank, pmm3d_last_error()
        call MPI_Abort(MPI_COMM_WORLD, 1, ierr)
    end subroutine
end program
