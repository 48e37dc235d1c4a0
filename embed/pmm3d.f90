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
! alpha, beta and arrays have the type of the matrices; other types are refused. Arrays are used in place: give a shard,
! and the arrays of a plan, the attribute target. A section with gaps, such as a(1:n, :), is refused. Pass an array of
! one or two dimensions, whole columns, or the first element. A shard of two dimensions has the shape of its box.
module pmm3d
    use, intrinsic :: iso_c_binding, only: c_associated, c_char, c_double, c_float, c_int, c_int32_t, c_int64_t, &
                                           c_loc, c_null_char, c_null_ptr, c_ptr, c_signed_char
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

        integer(c_int) function box_in_c(grid, layout, rows, columns, box, bytes) bind(C, name="pmm3d_box_f")
            import :: c_char, c_int, c_int64_t
            integer(c_int), value :: grid, bytes
            character(kind=c_char), intent(in) :: layout(*)
            integer(c_int64_t), value :: rows, columns
            integer(c_int64_t), intent(out) :: box(4)
        end function

        integer(c_int) function matrix_in_c(grid, type, rows, columns, layout, order, shard, of_shard, elements, &
                                            leading, matrix) bind(C, name="pmm3d_matrix_f")
            import :: c_char, c_int, c_int64_t, c_ptr, c_signed_char
            integer(c_int), value :: grid
            integer(c_signed_char), value :: type, order, of_shard
            integer(c_int64_t), value :: rows, columns, elements, leading
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
                                           descb, beta, c, ic, jc, descc, of_alpha, of_beta, of_a, of_b, of_c, plan) &
                bind(C, name="pmm3d_pgemm_f")
            import :: c_int, c_ptr, c_signed_char
            integer(c_int), value :: context, m, n, k, ia, ja, ib, jb, ic, jc
            integer(c_signed_char), value :: type, transa, transb, of_alpha, of_beta, of_a, of_b, of_c
            type(*), intent(in) :: alpha, beta
            type(c_ptr), value :: a, b, c, plan
            integer(c_int), intent(in) :: desca(9), descb(9), descc(9)
        end function

        integer(c_int) function pgemr2d_in_c(type, m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb, &
                                             of_a, of_b, plan) bind(C, name="pmm3d_pgemr2d_f")
            import :: c_int, c_ptr, c_signed_char
            integer(c_int), value :: m, n, ia, ja, contexta, ib, jb, contextb
            integer(c_signed_char), value :: type, of_a, of_b
            type(c_ptr), value :: a, b, plan
            integer(c_int), intent(in) :: desca(9), descb(9)
        end function

        integer(c_int) function from_block_cyclic_in_c(context, a, desca, matrix, of_a, plan) &
                bind(C, name="pmm3d_from_block_cyclic_f")
            import :: c_int, c_ptr, c_signed_char
            integer(c_int), value :: context, matrix
            type(c_ptr), value :: a, plan
            integer(c_int), intent(in) :: desca(9)
            integer(c_signed_char), value :: of_a
        end function

        integer(c_int) function to_block_cyclic_in_c(matrix, context, a, desca, of_a, plan) &
                bind(C, name="pmm3d_to_block_cyclic_f")
            import :: c_int, c_ptr, c_signed_char
            integer(c_int), value :: matrix, context
            type(c_ptr), value :: a, plan
            integer(c_int), intent(in) :: desca(9)
            integer(c_signed_char), value :: of_a
        end function

        integer(c_int) function from_blocks_in_c(block, box, order, matrix, of_block, base, plan) &
                bind(C, name="pmm3d_from_blocks_f")
            import :: c_int, c_int64_t, c_ptr, c_signed_char
            type(c_ptr), value :: block, plan
            integer(c_int64_t), intent(in) :: box(4)
            integer(c_signed_char), value :: order, of_block
            integer(c_int), value :: matrix, base
        end function

        integer(c_int) function to_blocks_in_c(matrix, block, box, order, of_block, base, plan) &
                bind(C, name="pmm3d_to_blocks_f")
            import :: c_int, c_int64_t, c_ptr, c_signed_char
            integer(c_int), value :: matrix, base
            type(c_ptr), value :: block, plan
            integer(c_int64_t), intent(in) :: box(4)
            integer(c_signed_char), value :: order, of_block
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
        integer(c_int) :: bytes
        bytes = 0
        select type (box)
        type is (integer(c_int32_t)); bytes = 4
        type is (integer(c_int64_t)); bytes = 8
        end select
        found = 0
        code = box_in_c(grid, trim(layout)//c_null_char, wide(rows), wide(columns), found, bytes)
        found = found + [1, 0, 1, 0]
        select type (box)
        type is (integer(c_int32_t)); box = int(found, c_int32_t)
        type is (integer(c_int64_t)); box = found
        end select
    end function

    ! type: that of the shard.
    integer(c_int) function pmm3d_matrix(grid, type, rows, columns, layout, order, shard, matrix) result(code)
        integer(c_int), intent(in) :: grid
        class(*), intent(in) :: rows, columns
        character, intent(in) :: type, order
        character(len=*), intent(in) :: layout
        class(*), intent(inout), target :: shard(..)
        integer(c_int), intent(out) :: matrix
        integer(c_int64_t) :: elements, leading
        elements = -1
        leading = -1
        select rank (shard)
        rank (1); elements = size(shard, kind=c_int64_t)
        rank (2); elements = size(shard, kind=c_int64_t); leading = size(shard, 1, c_int64_t)
        end select
        code = matrix_in_c(grid, as_char(type), wide(rows), wide(columns), trim(layout)//c_null_char, as_char(order), &
                           address(shard), type_in(shard), elements, leading, matrix)
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
        class(*), intent(in), target :: a(..), b(..)
        class(*), intent(inout), target :: c(..)
        code = pgemm_in_c(context, as_char(type), as_char(transa), as_char(transb), m, n, k, alpha, address(a), ia, &
                          ja, desca, address(b), ib, jb, descb, beta, address(c), ic, jc, descc, type_of(alpha), &
                          type_of(beta), type_in(a), type_in(b), type_in(c), c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_pgemm(context, type, transa, transb, m, n, k, alpha, a, ia, ja, desca, b, ib, &
                                             jb, descb, beta, c, ic, jc, descc, plan) result(code)
        integer(c_int), intent(in) :: context, m, n, k, ia, ja, ib, jb, ic, jc, desca(9), descb(9), descc(9)
        character, intent(in) :: type, transa, transb
        class(*), intent(in) :: alpha, beta
        class(*), intent(inout), target :: a(..), b(..), c(..)
        integer(c_int), intent(out), target :: plan
        code = pgemm_in_c(context, as_char(type), as_char(transa), as_char(transb), m, n, k, alpha, address(a), ia, &
                          ja, desca, address(b), ib, jb, descb, beta, address(c), ic, jc, descc, type_of(alpha), &
                          type_of(beta), type_in(a), type_in(b), type_in(c), c_loc(plan))
    end function

    integer(c_int) function pmm3d_pgemr2d(type, m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb) &
            result(code)
        integer(c_int), intent(in) :: m, n, ia, ja, contexta, ib, jb, contextb, desca(9), descb(9)
        character, intent(in) :: type
        class(*), intent(in), target :: a(..)
        class(*), intent(inout), target :: b(..)
        code = pgemr2d_in_c(as_char(type), m, n, address(a), ia, ja, desca, contexta, address(b), ib, jb, descb, &
                            contextb, type_in(a), type_in(b), c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_pgemr2d(type, m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb, &
                                               plan) result(code)
        integer(c_int), intent(in) :: m, n, ia, ja, contexta, ib, jb, contextb, desca(9), descb(9)
        character, intent(in) :: type
        class(*), intent(inout), target :: a(..), b(..)
        integer(c_int), intent(out), target :: plan
        code = pgemr2d_in_c(as_char(type), m, n, address(a), ia, ja, desca, contexta, address(b), ib, jb, descb, &
                            contextb, type_in(a), type_in(b), c_loc(plan))
    end function

    integer(c_int) function pmm3d_from_block_cyclic(context, a, desca, matrix) result(code)
        integer(c_int), intent(in) :: context, matrix, desca(9)
        class(*), intent(in), target :: a(..)
        code = from_block_cyclic_in_c(context, address(a), desca, matrix, type_in(a), c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_from_block_cyclic(context, a, desca, matrix, plan) result(code)
        integer(c_int), intent(in) :: context, matrix, desca(9)
        class(*), intent(inout), target :: a(..)
        integer(c_int), intent(out), target :: plan
        code = from_block_cyclic_in_c(context, address(a), desca, matrix, type_in(a), c_loc(plan))
    end function

    integer(c_int) function pmm3d_to_block_cyclic(matrix, context, a, desca) result(code)
        integer(c_int), intent(in) :: context, matrix, desca(9)
        class(*), intent(inout), target :: a(..)
        code = to_block_cyclic_in_c(matrix, context, address(a), desca, type_in(a), c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_to_block_cyclic(matrix, context, a, desca, plan) result(code)
        integer(c_int), intent(in) :: context, matrix, desca(9)
        class(*), intent(inout), target :: a(..)
        integer(c_int), intent(out), target :: plan
        code = to_block_cyclic_in_c(matrix, context, address(a), desca, type_in(a), c_loc(plan))
    end function

    integer(c_int) function pmm3d_from_blocks(block, box, order, matrix) result(code)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer(c_int), intent(in) :: matrix
        class(*), intent(in), target :: block(..)
        code = from_blocks_in_c(address(block), all_wide(box), as_char(order), matrix, &
                                type_in(block), 1_c_int, c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_from_blocks(block, box, order, matrix, plan) result(code)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer(c_int), intent(in) :: matrix
        class(*), intent(inout), target :: block(..)
        integer(c_int), intent(out), target :: plan
        code = from_blocks_in_c(address(block), all_wide(box), as_char(order), matrix, &
                                type_in(block), 1_c_int, c_loc(plan))
    end function

    integer(c_int) function pmm3d_to_blocks(matrix, block, box, order) result(code)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer(c_int), intent(in) :: matrix
        class(*), intent(inout), target :: block(..)
        code = to_blocks_in_c(matrix, address(block), all_wide(box), as_char(order), &
                              type_in(block), 1_c_int, c_null_ptr)
    end function

    integer(c_int) function pmm3d_plan_to_blocks(matrix, block, box, order, plan) result(code)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer(c_int), intent(in) :: matrix
        class(*), intent(inout), target :: block(..)
        integer(c_int), intent(out), target :: plan
        code = to_blocks_in_c(matrix, address(block), all_wide(box), as_char(order), &
                              type_in(block), 1_c_int, c_loc(plan))
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

    ! The type of the elements of an array, as by type_of; 0: it has none; '#': three dimensions; '-': gaps.
    integer(c_signed_char) function type_in(array) result(letter)
        class(*), intent(in), target :: array(..)
        letter = 0
        select rank (array)
        rank (0); letter = type_of(array)
        rank (1); if (size(array) > 0) letter = type_of(array(lbound(array, 1)))
        rank (2); if (size(array) > 0) letter = type_of(array(lbound(array, 1), lbound(array, 2)))
        rank (*); letter = type_of(array(1))
        rank default; letter = as_char('#')
        end select
        if (.not. c_associated(address(array))) letter = as_char('-') ! gfortran 12: is_contiguous of class(*) is wrong
    end function

    ! An integer of 4 or of 8 bytes, in 8; -huge for another type.
    integer(c_int64_t) function wide(number)
        class(*), intent(in) :: number
        wide = -huge(wide)
        select type (number)
        type is (integer(c_int32_t)); wide = number
        type is (integer(c_int64_t)); wide = number
        end select
    end function

    function all_wide(box) result(found)
        class(*), intent(in) :: box(4)
        integer(c_int64_t) :: found(4)
        integer :: i
        found = [(wide(box(i)), i=1, 4)]
    end function

    ! The address of an array or of an element; null for a section with gaps. The strides of one column do not count.
    type(c_ptr) function address(array)
        class(*), intent(in), target :: array(..)
        address = start(array)
        select rank (array)
        rank (2); if (size(array, 2) == 1) address = start(array(:, lbound(array, 2)))
        end select
    end function

    type(c_ptr) function start(array)
        type(*), intent(in), target :: array(..)
        start = c_null_ptr
        if (is_contiguous(array)) start = c_loc(array)
    end function
end module
