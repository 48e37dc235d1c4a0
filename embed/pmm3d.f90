! pmm3d from Fortran: compile this file with the program's own compiler, and link with -lpmm3d. It needs Fortran 2018
! (gfortran: no option, or -std=f2018).
!
! pmm3d.h describes every function, and has the rules for errors, the order of calls and threads. In Fortran a
! communicator is an integer (with mpi_f08: comm%mpi_val), texts have any length, rows and columns count from 1, and a
! shard stored by columns has the order 'F'.
!
! Integers are C's int: in a program compiled with -i8 or -fdefault-integer-8, declare them integer(c_int), or the
! compiler refuses them. Those of class(*) have 4 or 8 bytes: boxes, rows and columns of matrices, sizes for a grid, and
! bytes. A box is rows box(1) to box(2) and columns box(3) to box(4), counted from 1, the ends included. The end of an
! empty box is its beginning minus 1.
!
! alpha, beta and a shard have the type of the matrices; other types are refused. A shard, and the arrays of a plan, are
! used in place: give them the attribute target. A section with gaps, such as a(1:n, :), is refused. Pass a whole array,
! whole columns, or the first element of a block-cyclic array.
module pmm3d
    use, intrinsic :: iso_c_binding, only: c_char, c_double, c_float, c_int, c_int32_t, c_int64_t, c_loc, c_null_char, &
                                           c_null_ptr, c_ptr, c_signed_char
    implicit none
    private
    public :: pmm3d_start, pmm3d_finalize, pmm3d_last_error, pmm3d_error_everywhere, pmm3d_grid, pmm3d_grid_for, &
              pmm3d_grid_shape, pmm3d_context, pmm3d_max_workspace, pmm3d_box, pmm3d_matrix, pmm3d_free, pmm3d_run, &
              pmm3d_matmul, pmm3d_pgemm, pmm3d_redistribute, pmm3d_pgemr2d, pmm3d_from_block_cyclic, &
              pmm3d_to_block_cyclic, pmm3d_from_blocks, pmm3d_to_blocks, pmm3d_plan_matmul, pmm3d_plan_pgemm, &
              pmm3d_plan_redistribute, pmm3d_plan_pgemr2d, pmm3d_plan_from_block_cyclic, pmm3d_plan_to_block_cyclic, &
              pmm3d_plan_from_blocks, pmm3d_plan_to_blocks

    integer(c_int), parameter, public :: PMM3D_OK = 0, PMM3D_ERROR_ARGUMENT = 1, PMM3D_ERROR_DISAGREEMENT = 2, &
        PMM3D_ERROR_MEMORY = 3, PMM3D_ERROR_MPI = 4, PMM3D_ERROR_PYTHON = 5, PMM3D_ERROR_THREAD = 6, &
        PMM3D_ERROR_OTHER = 8

    interface
        integer(c_int) function pmm3d_start() bind(C)
            import :: c_int
        end function

        integer(c_int) function pmm3d_finalize() bind(C)
            import :: c_int
        end function

        integer(c_int) function pmm3d_error_everywhere() bind(C)
            import :: c_int
        end function

        integer(c_int) function pmm3d_grid(comm, gx, gy, gz, grid) bind(C, name="pmm3d_grid_f")
            import :: c_int
            integer(c_int), value :: comm, gx, gy, gz
            integer(c_int), intent(out) :: grid
        end function

        integer(c_int) function pmm3d_grid_shape(grid, shape) bind(C)
            import :: c_int
            integer(c_int), value :: grid
            integer(c_int), intent(out) :: shape(3)
        end function

        integer(c_int) function pmm3d_redistribute(source, target) bind(C)
            import :: c_int
            integer(c_int), value :: source, target
        end function

        integer(c_int) function pmm3d_plan_redistribute(source, target, plan) bind(C)
            import :: c_int
            integer(c_int), value :: source, target
            integer(c_int), intent(out) :: plan
        end function

        integer(c_int) function pmm3d_from_block_cyclic(context, a, desca, matrix) bind(C)
            import :: c_int
            integer(c_int), value :: context, matrix
            type(*), intent(in) :: a(*)
            integer(c_int), intent(in) :: desca(9)
        end function

        integer(c_int) function pmm3d_to_block_cyclic(matrix, context, a, desca) bind(C)
            import :: c_int
            integer(c_int), value :: matrix, context
            type(*) :: a(*)
            integer(c_int), intent(in) :: desca(9)
        end function

        integer(c_int) function pmm3d_run(plan) bind(C)
            import :: c_int
            integer(c_int), value :: plan
        end function

        integer(c_int) function pmm3d_free(object) bind(C)
            import :: c_int
            integer(c_int), intent(inout) :: object
        end function
    end interface

    ! Functions in C. Characters are passed by value as small integers: gfortran 12 passes a dummy character argument
    ! wrongly. Those with a plan run the operation if it is c_null_ptr.
    interface
        integer(c_int) function last_error(text, size) bind(C, name="pmm3d_last_error")
            import :: c_char, c_int
            character(kind=c_char), intent(out) :: text(*)
            integer(c_int), value :: size
        end function

        integer(c_int) function grid_for_in_c(comm, type, m, n, k, grid) bind(C, name="pmm3d_grid_for_f")
            import :: c_int, c_int64_t, c_signed_char
            integer(c_int), value :: comm
            integer(c_signed_char), value :: type
            integer(c_int64_t), value :: m, n, k
            integer(c_int), intent(out) :: grid
        end function

        integer(c_int) function context_in_c(comm, rows, columns, order, context) bind(C, name="pmm3d_context_f")
            import :: c_int, c_signed_char
            integer(c_int), value :: comm, rows, columns
            integer(c_signed_char), value :: order
            integer(c_int), intent(out) :: context
        end function

        integer(c_int) function max_workspace_in_c(object, bytes) bind(C, name="pmm3d_max_workspace")
            import :: c_int, c_int64_t
            integer(c_int), value :: object
            integer(c_int64_t), value :: bytes
        end function

        integer(c_int) function box_in_c(grid, layout, rows, columns, box) bind(C, name="pmm3d_box")
            import :: c_char, c_int, c_int64_t
            integer(c_int), value :: grid
            character(kind=c_char), intent(in) :: layout(*)
            integer(c_int64_t), value :: rows, columns
            integer(c_int64_t), intent(out) :: box(4)
        end function

        integer(c_int) function matrix_in_c(grid, type, rows, columns, layout, order, shard, of_shard, elements, &
                                            matrix) bind(C, name="pmm3d_matrix_f")
            import :: c_char, c_int, c_int64_t, c_ptr, c_signed_char
            integer(c_int), value :: grid
            integer(c_signed_char), value :: type, order, of_shard
            integer(c_int64_t), value :: rows, columns, elements
            character(kind=c_char), intent(in) :: layout(*)
            type(c_ptr), value :: shard
            integer(c_int), intent(out) :: matrix
        end function

        integer(c_int) function matmul_in_c(transa, transb, alpha, a, b, beta, c, of_alpha, of_beta, plan) &
                bind(C, name="pmm3d_matmul_f")
            import :: c_int, c_ptr, c_signed_char
            integer(c_signed_char), value :: transa, transb, of_alpha, of_beta
            type(*), intent(in) :: alpha, beta
            integer(c_int), value :: a, b, c
            type(c_ptr), value :: plan
        end function

        integer(c_int) function pgemm_in_c(context, type, transa, transb, m, n, k, alpha, a, ia, ja, desca, b, ib, jb, &
                                           descb, beta, c, ic, jc, descc, of_alpha, of_beta, plan) &
                bind(C, name="pmm3d_pgemm_f")
            import :: c_int, c_ptr, c_signed_char
            integer(c_int), value :: context, m, n, k, ia, ja, ib, jb, ic, jc
            integer(c_signed_char), value :: type, transa, transb, of_alpha, of_beta
            type(*), intent(in) :: alpha, beta
            type(c_ptr), value :: a, b, c, plan
            integer(c_int), intent(in) :: desca(9), descb(9), descc(9)
        end function

        integer(c_int) function pgemr2d_in_c(type, m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb, plan) &
                bind(C, name="pmm3d_pgemr2d_f")
            import :: c_int, c_ptr, c_signed_char
            integer(c_int), value :: m, n, ia, ja, contexta, ib, jb, contextb
            integer(c_signed_char), value :: type
            type(c_ptr), value :: a, b, plan
            integer(c_int), intent(in) :: desca(9), descb(9)
        end function

        integer(c_int) function plan_from_block_cyclic(context, a, desca, matrix, plan) &
                bind(C, name="pmm3d_plan_from_block_cyclic")
            import :: c_int, c_ptr
            integer(c_int), value :: context, matrix
            type(c_ptr), value :: a
            integer(c_int), intent(in) :: desca(9)
            integer(c_int), intent(out) :: plan
        end function

        integer(c_int) function plan_to_block_cyclic(matrix, context, a, desca, plan) &
                bind(C, name="pmm3d_plan_to_block_cyclic")
            import :: c_int, c_ptr
            integer(c_int), value :: matrix, context
            type(c_ptr), value :: a
            integer(c_int), intent(in) :: desca(9)
            integer(c_int), intent(out) :: plan
        end function

        integer(c_int) function from_blocks_in_c(block, box, order, matrix, plan) bind(C, name="pmm3d_from_blocks_f")
            import :: c_int, c_int64_t, c_ptr, c_signed_char
            type(c_ptr), value :: block, plan
            integer(c_int64_t), intent(in) :: box(4)
            integer(c_signed_char), value :: order
            integer(c_int), value :: matrix
        end function

        integer(c_int) function to_blocks_in_c(matrix, block, box, order, plan) bind(C, name="pmm3d_to_blocks_f")
            import :: c_int, c_int64_t, c_ptr, c_signed_char
            integer(c_int), value :: matrix
            type(c_ptr), value :: block, plan
            integer(c_int64_t), intent(in) :: box(4)
            integer(c_signed_char), value :: order
        end function
    end interface

contains

    ! The text of the last error of this thread, also after calls that succeed.
    function pmm3d_last_error() result(text)
        character(len=:), allocatable :: text
        character(kind=c_char) :: nothing(1)
        character(kind=c_char), allocatable :: found(:)
        integer :: length, i
        length = last_error(nothing, 1_c_int)
        allocate (found(length))
        length = last_error(found, int(length, c_int))
        allocate (character(len=size(found) - 1) :: text)
        do i = 1, len(text)
            text(i:i) = found(i)
        end do
    end function

    integer(c_int) function pmm3d_grid_for(comm, type, m, n, k, grid) result(code)
        integer(c_int), intent(in) :: comm
        character, intent(in) :: type
        class(*), intent(in) :: m, n, k
        integer(c_int), intent(out) :: grid
        code = grid_for_in_c(comm, as_char(type), wide(m), wide(n), wide(k), grid)
    end function

    integer(c_int) function pmm3d_context(comm, rows, columns, order, context) result(code)
        integer(c_int), intent(in) :: comm, rows, columns
        character, intent(in) :: order
        integer(c_int), intent(out) :: context
        code = context_in_c(comm, rows, columns, as_char(order), context)
    end function

    integer(c_int) function pmm3d_max_workspace(object, bytes) result(code)
        integer(c_int), intent(in) :: object
        class(*), intent(in) :: bytes
        code = max_workspace_in_c(object, wide(bytes))
    end function

    integer(c_int) function pmm3d_box(grid, layout, rows, columns, box) result(code)
        integer(c_int), intent(in) :: grid
        class(*), intent(in) :: rows, columns
        character(len=*), intent(in) :: layout
        class(*), intent(out) :: box(4)
        integer(c_int64_t) :: found(4)
        code = box_in_c(grid, trim(layout)//c_null_char, wide(rows), wide(columns), found)
        if (code /= PMM3D_OK) found = [-1, 0, -1, 0]
        found = found + [1, 0, 1, 0]
        select type (box)
        type is (integer(c_int32_t))
            box = int(found, c_int32_t)
        type is (integer(c_int64_t))
            box = found
        end select
    end function

    ! type: that of the shard.
    integer(c_int) function pmm3d_matrix(grid, type, rows, columns, layout, order, shard, matrix) result(code)
        integer(c_int), intent(in) :: grid
        class(*), intent(in) :: rows, columns
        character, intent(in) :: type, order
        character(len=*), intent(in) :: layout
        class(*), intent(in), target :: shard(..)
        integer(c_int), intent(out) :: matrix
        integer(c_signed_char) :: of_shard
        integer(c_int64_t) :: elements
        of_shard = 0
        elements = -1
        select rank (shard)
        rank (0)
            of_shard = type_of(shard)
        rank (1)
            elements = size(shard, kind=c_int64_t)
            if (elements > 0) of_shard = type_of(shard(lbound(shard, 1)))
        rank (2)
            elements = size(shard, kind=c_int64_t)
            if (elements > 0) of_shard = type_of(shard(lbound(shard, 1), lbound(shard, 2)))
        rank (*)
            of_shard = type_of(shard(1))
        end select
        code = matrix_in_c(grid, as_char(type), wide(rows), wide(columns), trim(layout)//c_null_char, as_char(order), &
                           address(shard), of_shard, elements, matrix)
    end function

    integer(c_int) function pmm3d_matmul(transa, transb, alpha, a, b, beta, c) result(code)
        character, intent(in) :: transa, transb
        class(*), intent(in) :: alpha, beta
        integer(c_int), intent(in) :: a, b, c
        code = matmul_in_c(as_char(transa), as_char(transb), alpha, a, b, beta, c, type_of(alpha), type_of(beta), &
                           c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_matmul(transa, transb, alpha, a, b, beta, c, plan) result(code)
        character, intent(in) :: transa, transb
        class(*), intent(in) :: alpha, beta
        integer(c_int), intent(in) :: a, b, c
        integer(c_int), intent(out), target :: plan
        code = matmul_in_c(as_char(transa), as_char(transb), alpha, a, b, beta, c, type_of(alpha), type_of(beta), &
                           c_loc(plan))
    end function

    integer(c_int) function pmm3d_pgemm(context, type, transa, transb, m, n, k, alpha, a, ia, ja, desca, b, ib, jb, &
                                        descb, beta, c, ic, jc, descc) result(code)
        integer(c_int), intent(in) :: context, m, n, k, ia, ja, ib, jb, ic, jc, desca(9), descb(9), descc(9)
        character, intent(in) :: type, transa, transb
        class(*), intent(in) :: alpha, beta
        type(*), intent(in), target :: a(*), b(*)
        type(*), target :: c(*)
        code = pgemm_in_c(context, as_char(type), as_char(transa), as_char(transb), m, n, k, alpha, c_loc(a), ia, ja, &
                          desca, c_loc(b), ib, jb, descb, beta, c_loc(c), ic, jc, descc, type_of(alpha), &
                          type_of(beta), c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_pgemm(context, type, transa, transb, m, n, k, alpha, a, ia, ja, desca, b, ib, &
                                             jb, descb, beta, c, ic, jc, descc, plan) result(code)
        integer(c_int), intent(in) :: context, m, n, k, ia, ja, ib, jb, ic, jc, desca(9), descb(9), descc(9)
        character, intent(in) :: type, transa, transb
        class(*), intent(in) :: alpha, beta
        type(*), intent(in), target :: a(..), b(..)
        type(*), target :: c(..)
        integer(c_int), intent(out), target :: plan
        code = pgemm_in_c(context, as_char(type), as_char(transa), as_char(transb), m, n, k, alpha, address(a), ia, &
                          ja, desca, address(b), ib, jb, descb, beta, address(c), ic, jc, descc, type_of(alpha), &
                          type_of(beta), c_loc(plan))
    end function

    integer(c_int) function pmm3d_pgemr2d(type, m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb) &
            result(code)
        integer(c_int), intent(in) :: m, n, ia, ja, contexta, ib, jb, contextb, desca(9), descb(9)
        character, intent(in) :: type
        type(*), intent(in), target :: a(*)
        type(*), target :: b(*)
        code = pgemr2d_in_c(as_char(type), m, n, c_loc(a), ia, ja, desca, contexta, c_loc(b), ib, jb, descb, contextb, &
                            c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_pgemr2d(type, m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb, &
                                               plan) result(code)
        integer(c_int), intent(in) :: m, n, ia, ja, contexta, ib, jb, contextb, desca(9), descb(9)
        character, intent(in) :: type
        type(*), intent(in), target :: a(..)
        type(*), target :: b(..)
        integer(c_int), intent(out), target :: plan
        code = pgemr2d_in_c(as_char(type), m, n, address(a), ia, ja, desca, contexta, address(b), ib, jb, descb, &
                            contextb, c_loc(plan))
    end function

    integer(c_int) function pmm3d_plan_from_block_cyclic(context, a, desca, matrix, plan) result(code)
        integer(c_int), intent(in) :: context, matrix, desca(9)
        type(*), intent(in), target :: a(..)
        integer(c_int), intent(out) :: plan
        code = plan_from_block_cyclic(context, address(a), desca, matrix, plan)
    end function

    integer(c_int) function pmm3d_plan_to_block_cyclic(matrix, context, a, desca, plan) result(code)
        integer(c_int), intent(in) :: matrix, context, desca(9)
        type(*), target :: a(..)
        integer(c_int), intent(out) :: plan
        code = plan_to_block_cyclic(matrix, context, address(a), desca, plan)
    end function

    integer(c_int) function pmm3d_from_blocks(block, box, order, matrix) result(code)
        type(*), intent(in), target :: block(*)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer(c_int), intent(in) :: matrix
        code = from_blocks_in_c(c_loc(block), from_0(box), as_char(order), matrix, c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_from_blocks(block, box, order, matrix, plan) result(code)
        type(*), intent(in), target :: block(..)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer(c_int), intent(in) :: matrix
        integer(c_int), intent(out), target :: plan
        code = from_blocks_in_c(address(block), from_0(box), as_char(order), matrix, c_loc(plan))
    end function

    integer(c_int) function pmm3d_to_blocks(matrix, block, box, order) result(code)
        integer(c_int), intent(in) :: matrix
        type(*), target :: block(*)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        code = to_blocks_in_c(matrix, c_loc(block), from_0(box), as_char(order), c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_to_blocks(matrix, block, box, order, plan) result(code)
        integer(c_int), intent(in) :: matrix
        type(*), target :: block(..)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer(c_int), intent(out), target :: plan
        code = to_blocks_in_c(matrix, address(block), from_0(box), as_char(order), c_loc(plan))
    end function

    integer(c_signed_char) function as_char(letter)
        character, intent(in) :: letter
        as_char = int(ichar(letter), c_signed_char)
    end function

    ! The type of a number as a letter of the BLAS; '?' for another type.
    integer(c_signed_char) function type_of(number) result(letter)
        class(*), intent(in) :: number
        letter = as_char('?')
        select type (number)
        type is (real(c_float)); letter = as_char('s')
        type is (real(c_double)); letter = as_char('d')
        type is (complex(c_float)); letter = as_char('c')
        type is (complex(c_double)); letter = as_char('z')
        end select
    end function

    ! An integer of 4 or of 8 bytes, in 8; -1 for another type.
    integer(c_int64_t) function wide(number)
        class(*), intent(in) :: number
        wide = -1
        select type (number)
        type is (integer(c_int32_t)); wide = number
        type is (integer(c_int64_t)); wide = number
        end select
    end function

    ! A box, counted from 0, the ends excluded.
    function from_0(box) result(found)
        class(*), intent(in) :: box(4)
        integer(c_int64_t) :: found(4)
        integer :: i
        found = [(wide(box(i)), i=1, 4)] - [1, 0, 1, 0]
    end function

    ! The address of an array or of an element; null for a section with gaps.
    type(c_ptr) function address(array)
        type(*), intent(in), target :: array(..)
        address = c_null_ptr
        if (is_contiguous(array)) address = c_loc(array)
    end function
end module
